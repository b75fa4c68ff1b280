# ruff: noqa: E501
"""Golden text: the groups of the programs that the design names, with their frames and repairs."""

import pytest

from tests.programs_by_name import grouping

GOLDEN = {
    "softmax": """\
fold t0[i] over j, pass 1 of 1
  t0.acc0 max= x[i, j]
  t0 = t0.acc0[i]
fold t6[i] over j, pass 1 of 1
  frame t6.frame0 = t0[i]
  t6.acc0 sum= exp(x[i, j] - t6.frame0[i]); repaired t6.acc0 = t6.acc0[i] * exp(t6.frame0.old[i] - t6.frame0[i])
  t6 = t6.acc0[i]
store t8[i, j] = exp(x[i, j] - t0[i]) / t6[i]""",
    "causal": """\
inner t6[i, l] sum[j:3]= q[i, j] * k[l, j]
fold t11[i] over l, pass 1 of 1
  t11.acc0 max= select(l <= i + 4, t6[i, l] * 0.5, -inf)
  t11 = t11.acc0[i]
fold t17[i] over l, pass 1 of 1
  frame t17.frame0 = t11[i]
  t17.acc0 sum= exp(select(l <= i + 4, t6[i, l] * 0.5, -inf) - t17.frame0[i]); repaired t17.acc0 = t17.acc0[i] * exp(t17.frame0.old[i] - t17.frame0[i])
  t17 = t17.acc0[i]
fold t20[i, m] over l, pass 1 of 1
  frame t20.frame0 = t11[i]
  t20.acc0 sum= exp(select(l <= i + 4, t6[i, l] * 0.5, -inf) - t20.frame0[i]) * v[l, m]; repaired t20.acc0 = t20.acc0[i, m] * exp(t20.frame0.old[i] - t20.frame0[i])
  t20 = t20.acc0[i, m] / t17[i]
store t20[i, m] = t20[i, m]""",
    "variance": """\
fold t0[i] over j, pass 1 of 1
  t0.acc0 sum= x[i, j]
  t0 = t0.acc0[i]
fold t7[i] over j, pass 1 of 1
  frame t7.frame0 = t0[i] / 13
  t7.acc0 sum= square(x[i, j] - t7.frame0[i]); repaired t7.acc0 = t7.acc0[i] + t7.acc1[i] * (2 * (t7.frame0.old[i] - t7.frame0[i])) + t7.acc2[i] * square(t7.frame0.old[i] - t7.frame0[i])
  t7.acc1 sum= x[i, j] - t7.frame0[i]; repaired t7.acc1 = t7.acc1[i] + t7.acc2[i] * (t7.frame0.old[i] - t7.frame0[i])
  t7.acc2 sum= 1; repaired t7.acc2 = t7.acc2[i]
  refined t7.acc0 = t7.acc0[i] + t7.acc1[i] * (2 * -(t7.acc1[i] / 13)) + t7.acc2[i] * square(-(t7.acc1[i] / 13))
  t7 = t7.acc0[i]
store t12[i] = t7[i] / 13""",
    "log_sum_exp": """\
fold t0[i] over j, pass 1 of 1
  t0.acc0 max= x[i, j]
  t0 = t0.acc0[i]
fold t9[i] over j, pass 1 of 1
  frame t9.frame0 = select(is_finite(t0[i]), t0[i], 0)
  t9.acc0 sum= exp(x[i, j] - t9.frame0[i]); repaired t9.acc0 = t9.acc0[i] * exp(t9.frame0.old[i] - t9.frame0[i])
  t9 = t9.acc0[i]
store t12[i] = log(abs(t9[i])) + select(is_finite(t0[i]), t0[i], 0)""",
    "entropy": """\
fold t0[i] over j, pass 1 of 1
  t0.acc0 max= x[i, j]
  t0 = t0.acc0[i]
fold t6[i] over j, pass 1 of 1
  frame t6.frame0 = t0[i]
  t6.acc0 sum= exp(x[i, j] - t6.frame0[i]); repaired t6.acc0 = t6.acc0[i] * exp(t6.frame0.old[i] - t6.frame0[i])
  t6 = t6.acc0[i]
fold t20[i] over j, pass 1 of 1
  frame t20.frame0 = log(t6[i])
  frame t20.frame1 = t0[i]
  t20.acc0 sum= exp(x[i, j] - t20.frame1[i]) * (x[i, j] - t20.frame1[i] - t20.frame0[i]); repaired t20.acc0 = t20.acc0[i] * exp(t20.frame1.old[i] - t20.frame1[i]) + t20.acc1[i] * ((t20.frame1.old[i] - t20.frame1[i] + (t20.frame0.old[i] - t20.frame0[i])) * exp(t20.frame1.old[i] - t20.frame1[i]))
  t20.acc1 sum= exp(x[i, j] - t20.frame1[i]); repaired t20.acc1 = t20.acc1[i] * exp(t20.frame1.old[i] - t20.frame1[i])
  t20 = t20.acc0[i] / t6[i]
store t21[i] = -t20[i]""",
    "norm_dot": """\
fold t1[i] over j, pass 1 of 1
  t1.acc0 sum= x[i, j] * x[i, j]
  t1 = t1.acc0[i]
fold t7[i, k] over j, pass 1 of 1
  frame t7.frame0 = rsqrt(t1[i] / 13 + 9.999999747378752e-06)
  t7.acc0 sum= x[i, j] * t7.frame0[i] * w[j, k]; repaired t7.acc0 = t7.acc0[i, k] * (t7.frame0[i] / t7.frame0.old[i])
  t7 = t7.acc0[i, k]
store t7[i, k] = t7[i, k]""",
    "layer_norm_dot": """\
fold t0[i] over j, pass 1 of 1
  t0.acc0 sum= x[i, j]
  t0 = t0.acc0[i]
fold t5[i] over j, pass 1 of 1
  frame t5.frame0 = t0[i] / 13
  t5.acc0 sum= (x[i, j] - t5.frame0[i]) * (x[i, j] - t5.frame0[i]); repaired t5.acc0 = t5.acc0[i] + t5.acc1[i] * (2 * (t5.frame0.old[i] - t5.frame0[i])) + t5.acc2[i] * square(t5.frame0.old[i] - t5.frame0[i])
  t5.acc1 sum= x[i, j] - t5.frame0[i]; repaired t5.acc1 = t5.acc1[i] + t5.acc2[i] * (t5.frame0.old[i] - t5.frame0[i])
  t5.acc2 sum= 1; repaired t5.acc2 = t5.acc2[i]
  refined t5.acc0 = t5.acc0[i] + t5.acc1[i] * (2 * -(t5.acc1[i] / 13)) + t5.acc2[i] * square(-(t5.acc1[i] / 13))
  t5 = t5.acc0[i]
fold t11[i, k] over j, pass 1 of 1
  frame t11.frame0 = rsqrt(t5[i] / 13 + 9.999999747378752e-06)
  frame t11.frame1 = t0[i] / 13
  t11.acc0 sum= (x[i, j] - t11.frame1[i]) * t11.frame0[i] * w[j, k]; repaired t11.acc0 = t11.acc0[i, k] * (t11.frame0[i] / t11.frame0.old[i]) + t11.acc1[i, k] * (t11.frame0[i] * (t11.frame1.old[i] - t11.frame1[i]))
  t11.acc1 sum= w[j, k]; repaired t11.acc1 = t11.acc1[i, k]
  t11 = t11.acc0[i, k]
store t11[i, k] = t11[i, k]""",
}


@pytest.mark.parametrize("name", GOLDEN)
def test_groups(name):
    (chosen,) = grouping(name).groups
    assert str(chosen) == GOLDEN[name]
