"""Every limit between rounding and an error, with what justifies it; the rooms have none of their own.

"Measured" is by `python -m benchmarks.verify_null` (right layouts; "the verifier's null experiment" in notes/) or
`python -m benchmarks.verify_limits` (right programs, in notes/). Where a reason stands instead, the limit was chosen
by it. "Chosen" alone: no false alarm in the null experiment and the corpus, and nothing finer is known. Sizes are
relative unless a line says what they are relative to.
"""

from __future__ import annotations

# What may be left of a gradient's sketch when it is written as a sum of contributions' sketches. Measured: right ones
# leave 3e-16, 1.0e-7 and 4.6e-3 in fp64, fp32 and bf16.
FIT = {"float64": 1e-8, "float32": 2e-4, "float16": 2e-2, "bfloat16": 3e-2}
FIT_OTHER = 2e-4  # of a dtype that is not listed: as float32
FIT_HALF = 0.1  # a fused loss is a mean, and no sum: the two are apart by the number of labels
# Coefficients are equal within so many FIT: a coefficient's error is the residual times the sketch's condition number,
# which INDEPENDENT bounds; in a run that is judged by itself, and beside a reference, where two fits are divided.
# Measured: free coefficients of right gradients are apart by at most 0.17 of LOOSE x FIT (bf16).
LOOSE, LOOSER = 10, 30
INDEPENDENT = 1e-4  # smallest singular value of the sketches of contributions: below it coefficients are one of many
SAME = 1e-6  # two contributions are one: ranks that compute the same thing in the same order are equal bit by bit
NOTHING = 1e-12  # of the largest contribution: fp64 leaves 1e-16 of it where zero is meant
# Of the largest gradient of the step: a gradient below it is rounding alone (key biases). Chosen.
ROUNDING = {"float64": 1e-13, "float32": 1e-7, "float16": 1e-4, "bfloat16": 1e-3}
ROUNDING_OTHER = 1e-7
# Two factors are the same one. Factors with a meaning (sizes of groups, numbers of micro-batches and labels) differ by
# 1 / 1000 at the least while these numbers are below 1000.
FACTOR = 1e-3
BASE = 1e-2  # a series of coefficients goes down by a whole number: 2 and 3 are 30 % apart
COUNTS = 1e-2  # a coefficient is not zero: one that counts is 1 / (micro-batches x ranks) of the largest, or more
# Left over of a gradient that is no sum of contributions: up to HALF_SUM a reduction in half precision explains it
# (bf16 keeps 2^-9 of each of a few terms), up to CHANGED it is a note: something small was done to it before the step.
HALF_SUM, CHANGED = 5e-2, 1e-2

# Losses of micro-batches are one loss that is computed again: fp32 leaves 1e-7 of it; two losses of other rows are
# apart by percents, and all terms on all ranks must be as near as this. Chosen.
SAME_LOSS = 1e-5

# Two products of a function and its backward are one number: of the product of the sizes of their factors. Rounding of
# fp32 leaves 1e-6 of it. Chosen.
ADJOINT = {"float64": 1e-9, "float32": 1e-4}
ADJOINT_HALF = 2e-2

NORM = 1e-5  # one norm on all ranks. Measured: two orders of fp32 sums are 9e-8 apart; a copy too many is percents
TRUE_NORM = 1e-4  # a reported norm above the true one: fp32 norms of a whole model are good to 1e-6
ONE_FACTOR = 1e-2  # all tensors of a rank were clipped by one factor. Chosen
SCALED = 1e-3  # of a gradient scaler's factor (2^16, at first): no bound of a clip that was multiplied by it. Chosen

# Of the gradients of logits: what is left of a sum that must be zero. Right ones leave about 1e-6 in fp32, one use of
# log_softmax too many leaves percents. In half precision: chosen, ten roundings of bf16.
SHIFT, SHIFT_HALF = 1e-3, 5e-2
ROW_SUMS = 4.0  # eps that sums of an embedding's rows are off (watch/collectives.py). Chosen: 3 % in bf16

CHANCE = 1e-2  # of ln(classes): a cross-entropy of zero logits is that number, to one rounding of bf16 (4e-3)

WHOLE = 1e-6  # a divisor is a whole number: counts reach it in fp32 with an error of 6e-8

TERM = 0.1  # a term counts so many times: one that is computed from other tokens differs by percents, a factor by 2

# Error of a tensor or block: up to the first it is rounding, above the second a bug; between them two recordings cannot
# tell. Measured: the null experiment's largest are 1.7e-12, 4.4e-4 (key biases; others 3.5e-6) and 5.6e-2.
LIMITS = {"float64": (1e-9, 1e-9), "float32": (1e-4, 1e-3), "float16": (3e-2, 2e-1), "bfloat16": (6e-2, 3e-1)}
# Of the whole gradient: a tensor or block that is smaller is measured against this. Measured: with the first for all
# dtypes, 40 of 2430 right tensors in fp32 and 136 in bf16 were above their limits; with these none.
FLOOR = 1e-6
FLOORS = {"float32": 1e-4, "float16": 3e-3, "bfloat16": 3e-2}
# Sketches estimate an error from m sums (record/sketch.py): the quotient of two norms is true to about 1 / sqrt(m),
# and is taken for true to ESTIMATE of these. Blocks have ESTIMATE_LEAST sums and more.
ESTIMATE, ESTIMATE_LEAST = 4.0, 16
# Errors in units of measured noise: below the first, rounding; above the second, a bug. Measured: at most 2.63.
NOISE = (3.0, 8.0)
# The one factor of all gradients together, in units of its noise, which is the root mean square of ten members. Of
# right layouts one in 400 lies above the first and one in 80,000 above the second (Student's t of ten values); at 3 it
# would be one in 75. Measured: at most 3.8 in 90 right layouts of twelve layers; 1 % too much in bf16 comes to 4.03.
ALL_TOGETHER = (4.0, 8.0)
# What rounding leaves of a sum whose terms cancel, in eps of the largest gradient. Measured: up to 2 (a convolution's
# bias before a batch norm, 2048 terms a channel); it grows with the root of their number. Chosen.
CANCELLED = 100.0
NOISE_FLOOR = 1e-3  # of the whole gradient, times eps: the least noise of a tensor of all of its elements
# One factor of a kind of parameter in half precision, in units of its noise (compare/classes.py): in a proof, and
# between two recordings. Measured by `python -m benchmarks.verify_kinds`: right kinds come to 2.5 and 4.1.
KIND, KIND_PAIR = (4.0, 6.0), (5.0, 8.0)
KIND_FLOOR, KIND_PAIR_FLOOR = 1 / 16, 1 / 6  # of eps: the least noise
KIND_AVERAGED = 0.7  # of the noise of one run is in the mean over the runs of a proof; measured: 0.6
KIND_LEAST, KIND_ERROR = 16, 0.5  # so many tensors, none of which is noise by half
KIND_LEAST_SQUARE = 1e-7  # least square of what is left of a tensor, so that no weight is without bounds
SINGLE = 2.0**-23  # eps of fp32
KIND_EPS = 1e-4  # a format with a smaller eps is no half precision: there each tensor shows such a factor by itself
NARROW = 1e-8  # above this limit weights differ by rounding after one step, and later steps are not compared
START = 1e-4  # weights before the first step: a file read in fp32 and in bf16 is 2e-3 apart, which is told
STORED = 1e-6  # a row of weights is a row of the reference's: two rows of an initialisation are 1 apart
UPDATE = {"float64": 1e-6}  # an update for an equal gradient: Adam divides rounding by its own square root
UPDATE_OTHER = 1e-2  # Chosen
HALF_UPDATE = 1e-2  # limits above this one are half precision's, whose updates are rounding
ROW = 1e-6  # of the tensor, for one row of it: right in some rows only. Chosen, as the next three
PERMUTED, PERMUTED_SMALL = 1e-6, 1e-9  # sorted numbers are the same numbers; of the tensor's size
BIAS = 1e-6  # a module's extra output is its bias, so many times
WORST = 0.1  # of the largest error of any rank: a rank with this much of it shows the symptom. Chosen
# A factor beside flipped choices of experts (compare/routing.py): so many times what is left of each of so many
# tensors, of so many elements. Chosen.
FLIP_SURE, FLIP_TENSORS, FLIP_ELEMENTS = 3.0, 2, 16
# Activations: a row is one of the reference's, of the largest row. Chosen.
ACTIVATION = {"float64": 1e-6, "float32": 1e-4}
ACTIVATION_HALF = 5e-2
NUMBERS = 1e-9  # of the largest number: the reference's numbers in other places; only in fp64

SLOPE = 1e-6  # Richardson's rule leaves about 1e-9 in fp64
SLOPE_FLOOR = 1e-3  # of the largest class's slope: smaller ones drown in the loss's own rounding


def least_factor(eps: float) -> float:
    """The least noise of the one factor of all gradients together. Scalars multiply everything: 1 / the labels of a
    micro-batch, its weight, 1 / the weight of the step. Each is rounded by up to eps / 2 of fp32, in all members of the
    ensemble alike, so their spread does not show it; three roundings must stay below the limit of 3. Measured: 0.85 eps
    under `tp2 sp` with 12 layers."""
    return max(eps / 4, SINGLE / 2)
