"""Failures while requests are served: given up, too large, starved, cut off; in virtual time and on real links."""
