"""How long tests wait for what must come."""

PATIENCE = 300.0  # seconds; what takes longer hangs, on however busy a machine
# Seconds within which something comes at once, however busy the machine is: without what is tested
# it takes half a minute or longer.
SOON = 15.0
