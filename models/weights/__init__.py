"""Weight formats, and products with the weights that they store.

A weight is a matrix [m, k]: a plain array, or a `Weight`, a pytree that multiplies rows
and looks up rows. A format is a `Format`: it stores matrices as weights. To add one,
write a file with both and a line in `formats.FORMATS`.
"""
