"""The data of chapter 4: 1,797 handwritten digits of 8 x 8 pixels.

They are those of scikit-learn's `load_digits`, whose import takes longer than some pages do. From
E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI Machine Learning Repository,
https://doi.org/10.24432/C50P49, under CC BY 4.0.
"""

from pathlib import Path

import numpy as np

with np.load(Path(__file__).with_name("digits.npz")) as digits:
    pixels_BI, classes_B = digits["pixels"], digits["classes"]  # 0 to 16, and 0 to 9

order = np.random.default_rng(0).permutation(len(classes_B))
images_BI = (pixels_BI[order] / 16).astype("float32")  # 64 pixels, 0 to 1
labels_B = classes_B[order].astype("int32")
train, test = slice(0, 1437), slice(1437, None)
