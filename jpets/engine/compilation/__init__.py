"""How programs become ready: at the start, in the background, and for classes that come later."""
