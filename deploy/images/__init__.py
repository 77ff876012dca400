"""Images: one Dockerfile with a target for each kind of pods, and the versions that go into it."""
