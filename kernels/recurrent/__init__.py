"""Layers whose past is a state of fixed size: convolutions and linear recurrences, in torch."""
