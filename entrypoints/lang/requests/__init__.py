"""The requests of a program's states: what each of them sends to the server, and what it may take over."""
