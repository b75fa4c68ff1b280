"""Other forms of a program that compute the same: found by algebra over named axes, and priced."""
