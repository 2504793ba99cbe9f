"""Options that several commands share."""

import argparse


def add_pair_options(p: argparse.ArgumentParser) -> None:
    p.add_argument("--model", default="demo", help="directory, hub id or demo")
    p.add_argument(
        "--drafter",
        help="directory, hub id, demo or none; default: demo for the demo model",
    )
    p.add_argument(
        "--tree", help="A..E, chain:N, binary:L, beam:WxD or parents:0,0,1; default E"
    )
    p.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
