import sys
from pathlib import Path

# The benchmarks are scripts in one folder, not a package.
BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path[:0] = [str(BENCHMARKS), str(BENCHMARKS / "rivals")]
