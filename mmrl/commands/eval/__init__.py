"""`mmrl eval`: what is evaluated, how, what it comes to, and where that is kept."""
