"""News sentences as template triples: "=" the anchor, "+" what it entails, "-" what contradicts, "&" its own slot.

The word after the mark names the relation; a line that begins with two spaces continues the one above it.
"""

NEWS = """
= Shares of {company} (fell|dropped|slid) {pct} percent on {day} after the {company^} (reported weak sales|lowered its
  forecast|lost a big contract).
+ synonym: {company} stock (lost|declined by) {pct} percent following (bad news|disappointing news) from the firm.
+ hypernym: A {company^} became less valuable on the stock market.
- antonym: Shares of {company} (rose|jumped|climbed) {pct} percent on {day} after the {company^} (reported strong
  sales|raised its forecast).
- number: Shares of {company} (fell|dropped) {pct!} percent on {day}.
= {company} (said|announced) on {day} that it (will|would) (cut|eliminate) {huge} jobs (in|at its plants in) {country}
  by the end of the year.
+ synonym: {huge} (workers|employees) in {country} are set to lose their (jobs|positions) at {company}.
+ hypernym: A {company^} plans to (shrink its workforce|reduce its staff).
- antonym: {company} (said|announced) on {day} that it will (hire|recruit) {huge} (people|workers) in {country}.
- place: {company} said it will cut {huge} jobs in {country!}, leaving its plants in {country} untouched.
= {company} (agreed|has agreed) to (buy|acquire|take over) {company2} for (about|roughly) {sum} dollars.
+ synonym: {company2} will be (sold to|acquired by) {company} in a {sum} dollar deal.
+ hypernym: Two (companies|firms) have agreed on a takeover.
- antonym: {company} has (walked away from|called off) a deal to buy {company2}.
- agent: {company2} agreed to (buy|acquire) {company} for (about|roughly) {sum} dollars.
= {company} to (open|build) (new|second) (plant|factory|research center) in {city}
+ synonym: The {company^} {company} is planning a (new site|new facility) in {city}.
+ hypernym: A company is (expanding|going to expand) in {city^}.
- antonym: {company} to (close|shut down) its (plant|factory|research center) in {city}
- place: {company} (picks|chooses) {city!} over {city} for its new (plant|site)
= The chief executive of {company} (resigned|stepped down) on {day} (after {years} in the post|amid an accounting
  scandal).
+ synonym: The (head|boss) of {company} has (quit|given up the job).
+ hypernym: A {company^} is losing its top manager.
- antonym: The chief executive of {company} (refused to resign|vowed to stay) on {day} (despite an accounting
  scandal|despite criticism).
- agent: The (chief executive|chairwoman) of {company!} (resigned|stepped down) on {day}.
= {company} (recalled|is recalling) {huge} {goods} because (they may catch fire|of a safety risk|they could cause
  injuries).
+ synonym: (Owing to|Because of) a (hazard|danger), {huge} {goods} made by {company} are being (withdrawn|taken back).
+ hypernym: A firm is taking back (unsafe|dangerous) {goods^}.
- negation: {company} said its {goods} are (safe|free of defects) and will not be recalled.
- object: {company} is recalling {huge} {goods!} because of a safety risk.
= (Quarterly|Annual|Third-quarter) profit at {company} (rose|grew|climbed) {pct} percent, (helped by|thanks to) (strong
  demand|lower costs|new products).
+ synonym: {company} (earned|made) {pct} percent more (money|profit) than in the same period a year (before|earlier).
+ hypernym: A {company^} did better than before.
- antonym: Profit at {company} (fell|shrank|dropped) {pct} percent, hurt by (weak demand|higher costs).
- antonym: {company} (posted|reported) a (loss|net loss) because of (weak demand|rising costs).
= The price of {commodity} (rose|jumped|climbed) (to a two-year high|sharply) on {day} (amid supply fears|as demand
  grew).
+ synonym: {commodity} (became|got) more expensive on {day}.
+ hypernym: There was a price (increase|rise) on the commodity markets.
- antonym: The price of {commodity} (fell|plunged|sank) (to a two-year low|sharply) on {day} (amid weak demand|as
  stocks grew).
- negation: The price of {commodity} (did not change|stayed flat) on {day}.
= {country^} stocks (closed|ended) (higher|up) on {day}, with the main index gaining {pct} percent.
+ synonym: The {country^} stock market (advanced|rose) by {pct} percent on {day}.
+ hypernym: Share prices went up in {country}.
- antonym: {country^} stocks (closed|ended) (lower|down) on {day}, with the main index losing {pct} percent.
- place: {country^} stocks slumped on {day} while the {country!^} index gained {pct} percent.
= (The central bank of {country}|{country}'s central bank) (raised|lifted) its (key|main) interest rate (to fight
  inflation|on {day}|for the third time this year).
+ synonym: Borrowing (becomes|will become) more (expensive|costly) in {country} after a rate (increase|rise).
+ hypernym: The central bank of {country} has (changed its policy|taken a decision on interest rates).
- antonym: {country}'s central bank (cut|lowered) its (key|main) interest rate (to support growth|on {day}).
- negation: {country}'s central bank (left|kept) its interest rate unchanged.
= Inflation in {country} (slowed|eased|fell) to {pct} percent in {month}, (the statistics office said|official figures
  showed).
+ synonym: Consumer prices in {country} (rose more slowly|increased at a slower pace) in {month}.
+ drop: Inflation (eased|went down) in {country}.
- antonym: Inflation in {country} (accelerated|picked up|surged) to {pct} percent in {month}.
- place: Prices in {country} kept climbing ever faster in {month}, while they slowed in {country!}.
= Unemployment in {country} (rose|climbed) to its highest level in {years}.
+ synonym: More people are (out of work|without jobs) in {country} than at any time in {years}.
+ hypernym: The (job|labor) market in {country} has (worsened|weakened).
- antonym: Unemployment in {country} (fell|dropped) to its lowest level in {years}.
- negation: The jobless rate in {country} did not rise (this year|at all).
= At least {n} people were killed and {big} injured when a {vehicle} (crashed|overturned) near {city} on {day}.
+ hypernym: Several people died in (an accident|a traffic accident) in {city^}.
+ synonym: A {vehicle} (accident|crash) close to {city} (claimed|cost) at least {n} lives.
- negation: Nobody was (hurt|killed) when a {vehicle} (crashed|overturned) near {city} on {day}.
- place: At least {n} people were killed when a {vehicle} (crashed|overturned) near {city!}.
= {n} (killed|dead) in {vehicle} (crash|accident) (near|outside) {city}
+ synonym: (Fatal|Deadly) {vehicle} accident close to {city} (claims|takes) {n} lives
+ hypernym: (Several people|People) die in accident in {city^}
- number: {n!} (killed|dead) in {vehicle} (crash|accident) (near|outside) {city}
- negation: All passengers survive {vehicle} crash near {city}
= A (fire|blaze) (destroyed|gutted) {building} in {city} (early on {day}|late on {day}), (officials|firefighters) said.
+ synonym: In {city}, {building} burned down.
+ passive: According to officials, {building} in {city} was destroyed by (fire|flames).
- antonym: Firefighters (saved|rescued) {building} in {city} from a fire (early on {day}|late on {day}).
- object: A flood damaged {building!} in {city}.
= Investigators (believe|said) that the fire at {building} in {city} was (caused by|started by) {cause}.
+ synonym: According to investigators, {cause} (set off|led to) the blaze in {city}.
+ hypernym: A cause has been found for a fire in {city^}.
- object: Investigators (believe|said) that the fire in {city} was (caused by|started by) {cause!}.
- antonym: Investigators have no idea what (caused|started) the fire at {building} in {city}.
= A magnitude {mag} earthquake (struck|hit|shook) (western|eastern|southern|northern) {country} on {day}, (damaging
  buildings|killing {big} people|forcing people from their homes).
+ synonym: {country} was (hit|rocked) by a (strong quake|tremor) of magnitude {mag}.
+ hypernym: There was a natural disaster in {country}.
- place: The magnitude {mag} earthquake on {day} was in {country!}, not in {country}.
- negation: Seismologists (recorded|measured) no earthquakes in {country} on {day}.
= (Strong|Magnitude {mag}) (quake|earthquake) (hits|shakes|rattles) {country}
+ synonym: Powerful tremor felt in {country}
+ hypernym: Ground shakes in {country^} region
- object: (Heavy flooding|Powerful storm) (hits|batters) {country}
- antonym: {country} quake alarm was false, (experts|officials) say
= (Heavy|Torrential) rain (caused|triggered) (floods|flooding) in {city}, (forcing|leading) {huge} people to
  (leave|flee) their homes.
+ synonym: {huge} (residents|people) of {city} had to (get to safety|be evacuated) because of (floods|high water).
+ hypernym: Bad weather has (driven people from|affected) homes in {city^}.
- antonym: A (long drought|dry spell) has left {huge} people in {city} without (water|drinking water).
- negation: Despite (heavy|torrential) rain, nobody in {city} had to leave home.
= A (storm|hurricane|cyclone|typhoon) is (moving|heading) toward {city} and (is expected to|should) (make
  landfall|arrive) on {day}.
+ synonym: {city} (expects|is bracing for) a severe (tropical storm|storm) on {day}.
+ hypernym: Bad weather is (on its way|expected).
- antonym: A (storm|hurricane|cyclone) is moving away from {city} and is (weakening|losing strength).
- negation: Forecasters (said|expect) that {city} will not be hit by the storm.
= Temperatures in {city} (rose|climbed) above {big_temp} degrees on {day}, the hottest {month} day (on record|in
  {years}).
+ synonym: {city} (sweltered|suffered) in record heat on {day}.
+ hypernym: It was very hot in a city in {city^}.
- antonym: Temperatures in {city} (fell|dropped) below freezing on {day}, the coldest {month} day (on record|in
  {years}).
- place: {day} was cool in {city}, while a heat record was broken in {city!}.
= Snow (closed|shut) {shut} in (parts of|northern) {country} on {day}.
+ synonym: In parts of {country}, {shut} were not open because of winter weather.
& shut: schools, airports, mountain roads, ski resorts, rail lines, border crossings
+ hypernym: Winter weather caused (disruption|trouble) in {country}.
- negation: All {shut} in {country} (stayed open|remained open) despite the snow.
- object: A heat wave (closed|shut) {shut} in {country}.
= {group} in {city} (went on strike|walked off the job) on {day} to (demand|call for) (higher pay|better working
  conditions|shorter hours).
+ synonym: (Demanding|Calling for) (a better deal|improvements), {group} (stopped work|laid down their tools) in {city}.
+ hypernym: {group^} are taking (industrial action|part in a protest) in {city^}.
- antonym: {group} in {city} (ended their strike|returned to work) on {day} after (winning|getting) (higher pay|better
  conditions).
- agent: {group!} in {city} went on strike on {day}, but {group} kept working.
= (Thousands|Hundreds) of {group} (marched|rallied|demonstrated) in {city} against (pension cuts|a new labor law|rising
  prices).
+ synonym: A (mass protest|large demonstration) by {group} took place in {city}.
+ hypernym: {group^} protested in a city in {city^}.
- antonym: (Thousands|Hundreds) of {group} (celebrated|danced) in {city} after (pension cuts were dropped|the law was
  repealed).
- number: Only {n} {group} turned up for a protest in {city}.
= {official} of {country} (arrived|landed) in {city} on {day} for (trade|peace|climate) talks.
+ synonym: For (talks|negotiations), {official} of {country} has (traveled|come) to {city}.
+ hypernym: A {country^} politician is visiting {city^}.
- antonym: {official} of {country} (canceled|called off) a trip to {city} (planned for {day}|at short notice).
- agent: {official!} of {country}, not {official}, (arrived|landed) in {city} on {day}.
= {country^} (parliament approves|lawmakers pass|parliament backs) (law|bill) (banning|prohibiting) {vice}
& vice: plastic bags, smoking in parks, night flights, gambling adverts, mink farms, street racing, diesel cars
+ synonym: (New ban|Ban) (wins|gets) approval (in|of) {country^} legislature
+ hypernym: Lawmakers vote for new rules in {country}
- antonym: {country^} (parliament rejects|lawmakers vote down) (proposed ban|planned law) on {vice}
- negation: No vote held in {country^} parliament on ban
= The government of {country} (plans|intends) to (raise|increase) the tax on {tax} (next year|from {month}).
+ synonym: A higher {tax} tax is planned in {country}; buyers of {tax^} will pay more.
+ hypernym: Tax changes are (ahead|planned) in {country}.
- antonym: The government of {country} (plans|intends) to (lower|cut|abolish) the tax on {tax} (next year|from {month}).
- object: The government of {country} will leave the tax on {tax} alone and raise the one on {tax!}.
= {official} of {country} (denied|rejected) (allegations|claims) of (corruption|bribery|tax fraud) on {day}.
+ synonym: Accused of (wrongdoing|an offense), {official} of {country} said it was not true.
+ hypernym: A {country^} leader (responded to|answered) accusations.
- antonym: {official} of {country} (admitted|confessed to) (corruption|bribery|tax fraud) on {day}.
- agent: {official} of {country} accused {official!} of (corruption|bribery|tax fraud).
= {country} and {country2} signed (a trade agreement|a peace treaty|a fishing deal) (after {years} of
  talks|in {city}|on {day}).
+ synonym: (A deal|An agreement) has been (signed|concluded) between {country} and {country2}.
+ hypernym: Two countries (reached agreement|came to terms).
- antonym: Talks between {country} and {country2} (collapsed|broke down) without (a deal|an agreement).
- agent: {country2} signed an agreement with {country!} after dropping its talks with {country}.
= Voters in {country} (go|head) to the polls on {day} (to elect a new parliament|to choose a president).
+ synonym: {country} (holds|is holding) (elections|an election) on {day}.
+ hypernym: People in {country} (will cast|can cast) their votes.
- antonym: {country} has (postponed|called off) the election that was planned for {day}.
- negation: There will be no (vote|election) in {country} (this year|on {day}).
= The (ruling party|opposition) in {country} won (a clear majority|the regional elections), (partial|early) results
  (show|showed).
+ synonym: According to (first counts|results), the (vote|election) in {country} was won by one of the main parties.
+ hypernym: There was an election in {country}.
- antonym: Both the ruling party and the opposition in {country} lost (heavily|most of their seats) to a new movement.
- negation: Nobody won the election in {country}, which (was annulled|ended in a tie).
= {country} (expels|throws out) {n} {country2^} diplomats (over spying claims|in row over border)
+ synonym: {n} envoys of {country2} (ordered|told) to leave {country}
+ hypernym: Relations (worsen|sour) between {country} and {country2}
- antonym: {country} (welcomes|receives) {n} {country2^} diplomats (for talks|after border deal)
- agent: {country2} (expels|throws out) {n} {country^} diplomats
= Police in {city} (arrested|detained) {n} (men|people|suspects) (on suspicion of|in connection with) (smuggling|car
  theft|burglary|fraud).
+ passive: {n} (men|people|suspects) were (arrested|taken into custody) by police in {city}.
+ hypernym: There have been arrests in {city^} (over a crime|in a criminal case).
- antonym: Police in {city} (released|freed) {n} people (for lack of evidence|without charge).
- number: Police in {city} have arrested (only one suspect|nobody) so far.
= {country^} (court|judge) (jails|imprisons) {convict} for {years}
& convict: ex-banker, former mayor, hacker, surgeon, police chief, art dealer, smuggler, football coach
+ synonym: {convict} (must serve|gets) prison term in {country}
+ hypernym: {country^} court (punishes|convicts) offender
- antonym: {country^} (court|judge) (acquits|clears) {convict} (of fraud|of theft)
- negation: {convict} will not go to (jail|prison), {country^} court rules
= (Thieves|Robbers|Burglars) (stole|took) {loot} worth {value} dollars from {from} in {city}.
+ passive: {loot} worth {value} dollars were stolen in {city}.
+ hypernym: There was a (theft|robbery) in {city^}.
- antonym: (Thieves|Robbers|Burglars) (returned|gave back) everything they had stolen in {city}.
& loot: paintings, jewels, rare coins, gold bars, watches, antique clocks
& from: a museum, a bank, a gallery, a private house, an auction house, a warehouse
& value: half a million, two million, four million, 90,000, 300,000
- negation: Nothing was (stolen|taken) in the (attempted robbery|burglary) in {city}.
= A (bomb|car bomb|roadside bomb) (exploded|went off) (near|outside) (a market|a police station|a government office) in
  {city}, killing {n} people.
+ synonym: {n} people (died|lost their lives) in a (blast|bombing|bomb attack) in {city}.
+ hypernym: An (attack|explosion) (caused|led to) deaths in {city^}.
- antonym: A (bomb|car bomb) was (defused|found and made safe) in {city} before it could (explode|hurt anyone).
- number: A bomb in {city} killed (one person|{n!} people).
= (Gunmen|Rebels|Militants) (attacked|stormed) (a military base|an army post|a convoy) in (northern|eastern|western)
  {country} on {day}.
+ passive: (Soldiers|An army target) in {country} came under attack from armed men on {day}.
+ hypernym: There was (violence|fighting) in {country}.
- antonym: (Gunmen|Rebels|Militants) (surrendered|laid down their arms) in {country} on {day}.
- agent: The {country^} army (attacked|stormed) a rebel camp on {day}.
= (Rescuers|Rescue workers) pulled {n} (survivors|people alive) from the (rubble|ruins) of {building} in {city}.
+ synonym: {n} people were (saved|brought out alive) after {building} had collapsed in {city}.
+ hypernym: A rescue operation in {city^} (was a success|saved lives).
- negation: (Rescuers|Rescue workers) found no survivors in the (rubble|ruins) of {building} in {city}.
- number: (Rescuers|Rescue workers) found {n!} survivors in {city}.
"""
