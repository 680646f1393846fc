"""Files and terminals: bounded reading of what comes from outside, a temporary folder, the width of a terminal."""
