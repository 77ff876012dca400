"""How long tests wait for what must come."""

PATIENCE = 300.0  # seconds; what takes longer hangs, on however busy a machine
