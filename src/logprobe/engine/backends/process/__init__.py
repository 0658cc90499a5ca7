"""The native engine in separate processes: parent side, child side, and the messages between them."""
