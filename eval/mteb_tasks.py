"""Tasks of MTEB, run by mteb, which downloads their data from the Hugging Face hub.

python eval/mteb_tasks.py --model DIR --tasks STSBenchmark SICK-R
python eval/mteb_tasks.py --model DIR --tasks NFCorpus --prompts Retrieval-query query.yaml Retrieval-document plain
python eval/mteb_tasks.py --model DIR --tasks Banking77Classification --name me/my-model --output mteb_results

It needs mteb: pip install 'angle_llm[mteb]'.
"""

import tyro

import angle_llm
from angle_llm.cli import guarded
from angle_llm.evaluate.mteb_tasks import MtebSettings, mteb_main

if __name__ == "__main__":
    guarded(lambda: mteb_main(tyro.cli(MtebSettings), angle_llm.SentenceEncoder.from_pretrained))
