"""Every scheduling decision: pure state machines without clock, randomness or I/O."""
