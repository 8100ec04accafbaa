"""Layers that keep a recurrent state: where a step's states are, and the recurrences over them."""
