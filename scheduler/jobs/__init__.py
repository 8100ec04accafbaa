"""Jobs: agents that send their next step after a tool has run, and how long such tools take."""
