"""Every periodic pass, and the frame they share."""
