"""What is too large for one sequence, and therefore a damaged file or a false header."""

MAX_FILE = 2**31  # bytes of a file, and of an array
MAX_STEPS = 2**26
MAX_CHANNELS = 2**16
SMALL = 2**24  # bytes: what unpacks to less harms nobody
MAX_RATIO = 200  # of unpacked to packed size; numbers that were measured come to 20 at most
