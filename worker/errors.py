"""What a rank can fail of that others must tell apart. Needs nothing, so that all can import it."""


class GroupBroken(Exception):
    """Another rank of the group failed, left or did not come in time."""
