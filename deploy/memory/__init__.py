"""How much memory a configuration will take, estimated before anything starts."""
