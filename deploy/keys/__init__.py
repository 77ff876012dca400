"""What an operator may set, by the groups in which `topwork serve --help` shows it."""
