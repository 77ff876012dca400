"""An adapter catalog and a scheduler in memory, for tests of routers."""
