"""Steps that are only watched: what is looked at in them, and which steps are captured in full instead."""
