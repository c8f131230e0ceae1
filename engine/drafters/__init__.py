"""Where draft tokens come from, and the gate that decides whether they pay."""
