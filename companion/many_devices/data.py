"""The data of chapter 4: 1,797 handwritten digits of 8 x 8 pixels, from scikit-learn."""

import numpy as np
from sklearn.datasets import load_digits

digits = load_digits()
order = np.random.default_rng(0).permutation(len(digits.target))
images_BI = (digits.data[order] / 16).astype("float32")  # 64 pixels, 0 to 1
labels_B = digits.target[order].astype("int32")
train, test = slice(0, 1437), slice(1437, None)
