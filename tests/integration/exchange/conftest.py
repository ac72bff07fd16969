"""The lab that every test here starts its hosts in."""

from support.loopback_hosts import lab, short_dir

__all__ = ["lab", "short_dir"]
