"""Jobs: agents whose steps come back after a tool has run, and how long such tools take."""
