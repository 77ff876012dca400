"""Answers of a given form: whether all are valid, and what they cost."""
