"""What each process boundary of the mesh costs: rungs of a ladder, load points, round trips."""
