"""Newton-Schulz: a matrix with the same singular vectors and singular values near one, by products
only.
"""
