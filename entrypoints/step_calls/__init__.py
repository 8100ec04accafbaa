"""Finds out which tool an agent's answer calls, in whatever form its model writes calls. Text in, plain data out."""
