"""A decode kernel for AMD's CDNA 3 and 4 (gfx942, gfx950), in Gluon."""
