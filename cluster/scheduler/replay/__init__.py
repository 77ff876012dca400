"""The numbered event log of a scheduler, and its replay."""
