"""A run on many machines: started over ssh, watched, and ended together."""

from longtake.cluster.hosts import Host, read_hosts
from longtake.cluster.launch import Launch, run, show
from longtake.cluster.words import forwarded, name_and_folder

__all__ = ["Host", "Launch", "forwarded", "name_and_folder", "read_hosts", "run", "show"]
