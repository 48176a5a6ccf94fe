from __future__ import annotations

import numpy as np

from trionnx.gpu.kernels.spectral import transform


def parts(z):
    return np.stack([z.real, z.imag], -1)


def test_transforms(cases, rng, variant):
    for shape, axis, length in (
        ((3, 8, 1), 1, None),
        ((3, 8, 2), 1, None),
        ((2, 5, 7, 1), 1, None),
        ((2, 5, 7, 2), -2, None),
        ((4, 6, 2), 0, None),
        ((2, 9, 1), 1, 12),
        ((2, 9, 2), 1, 5),
        ((1, 300, 1), 1, None),
    ):
        x = rng.standard_normal(shape, np.float32)
        z = (x[..., 0] + 1j * x[..., -1] if shape[-1] == 2 else x[..., 0]).astype(np.complex128)
        place = axis % len(shape)
        extra = [None if length is None else np.array(length), np.array(axis)]
        cases.add("DFT", x, *extra, want=parts(np.fft.fft(z, length, place)), tol=1e-5)
        cases.add("DFT", x, *extra, want=parts(np.fft.ifft(z, length, place)), tol=1e-5, inverse=1)
        if shape[-1] == 1:
            cases.add("DFT", x, *extra, want=parts(np.fft.rfft(z.real, length, place)), tol=1e-5, onesided=1)
        else:
            want = np.fft.irfft(z, length, place)[..., None]
            cases.add("DFT", x, *extra, want=want, tol=1e-5, onesided=1, inverse=1)
    cases.check(opset=20)


def test_transforms_of_opset_17(cases, rng):
    x = rng.standard_normal((2, 8, 3, 1), np.float32)
    for axis in (1, 2):
        cases.add("DFT", x, want=parts(np.fft.fft(x[..., 0], axis=axis)), tol=1e-5, axis=axis)
    cases.add("DFT", x, None, tol=1e-5, onesided=1)
    cases.check(opset=17)


def test_frames(cases, rng, variant):
    for real, window, onesided, step, length in (
        (True, "known", 1, 4, 16),
        (True, "fed", 0, 5, 16),
        (True, None, 1, 8, 10),
        (False, "fed", 0, 4, 16),
    ):
        x = rng.standard_normal((2, 50, 1 if real else 2), np.float32)
        shape = rng.random(length, np.float32) if window else None
        frames = 1 + (50 - length) // step
        z = (x[..., 0] if real else x[..., 0] + 1j * x[..., 1]).astype(np.complex128)
        laid = np.stack([z[:, f * step : f * step + length] for f in range(frames)], 1) * (
            1 if shape is None else shape
        )
        want = np.fft.fft(laid)
        want = parts(want[..., : length // 2 + 1] if onesided else want)
        cases.add(
            "STFT",
            x,
            np.array(step),
            shape,
            np.array(length),
            known=(2,) if window == "known" else (),
            want=want,
            tol=1e-5,
            onesided=onesided,
        )
    cases.check(opset=17)


def test_a_matrix_of_turns():
    x = np.arange(6.0)
    np.testing.assert_allclose(x @ transform(6, 6, 1, False, True), parts(np.fft.rfft(x)).reshape(-1), atol=1e-5)
