"""Pictures of ranks, timelines and collectives as SVG."""
