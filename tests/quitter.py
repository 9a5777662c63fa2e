"""A module that ends the program which imports it."""

import sys

sys.exit()
