"""Long runs, started by ``scripts/soak``: saves under faults and kills, and inputs that nobody wrote on purpose."""
