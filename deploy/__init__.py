"""Composition: configuration, command line and the only place where actors are made."""
