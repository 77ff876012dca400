"""Thin Ray shells around the plain classes; they hold sockets, clocks and supervision."""
