"""Tasks of MTEB, run by mteb, which downloads their data from the Hugging Face hub.

python eval/mteb_tasks.py --model DIR --tasks STSBenchmark SICK-R
python eval/mteb_tasks.py --model DIR --tasks NFCorpus --prompts Retrieval-query query.yaml Retrieval-document plain
python eval/mteb_tasks.py --model DIR --tasks Banking77Classification --name me/my-model --output mteb_results

It needs mteb: pip install 'angle_llm[mteb]'.
"""

import sys

from angle_llm.cli import guarded, run

if __name__ == "__main__":
    guarded(run, ["eval", "mteb", *sys.argv[1:]])
