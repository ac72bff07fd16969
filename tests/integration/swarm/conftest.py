"""The fixture that starts the hosts of each test."""

from support.loopback_hosts import lab, short_dir

__all__ = ["lab", "short_dir"]
