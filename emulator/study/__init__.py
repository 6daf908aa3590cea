"""What is asked of several runs together: do two fabrics agree, and what follows from a series of runs."""
