"""What a cluster does when its processes die, stop or are cut off: under traffic, compared."""
