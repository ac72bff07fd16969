"""The lab that every test here starts its hosts in."""

from support.swarm_lab import lab, short_dir

__all__ = ["lab", "short_dir"]
