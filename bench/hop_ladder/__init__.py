"""Cost of each process boundary of the mesh: rungs of a ladder, load points, round trips."""
