"""The K and V of every page that a rank holds, on its device and in host memory."""
