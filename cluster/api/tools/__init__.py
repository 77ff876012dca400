"""Tools and thoughts of chats: what a call asks for, and the messages that come of it."""
