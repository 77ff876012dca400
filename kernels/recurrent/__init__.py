"""Layers whose past is a state of fixed size: short convolutions and linear recurrences, in torch."""
