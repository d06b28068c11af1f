"""Stock valuation."""
