{{/* What pods have in common. */}}

{{- define "moiety.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "moiety.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{/* Of (list root image): where a container comes from. */}}
{{- define "moiety.from" -}}
image: {{ include "moiety.image" . }}
imagePullPolicy: {{ (index . 0).Values.image.pullPolicy }}
securityContext:
  {{- include "moiety.containerSecurity" . | nindent 2 }}
{{- end -}}

{{- define "moiety.pullSecrets" -}}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- end -}}

{{/* Of (list root part component): where pods may run; replicas of a part spread over nodes. */}}
{{- define "moiety.placement" -}}
{{- $part := index . 1 -}}
{{- with $part.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $part.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $part.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "moiety.selector" (list (index . 0) (index . 2)) | nindent 8 }}
{{- end -}}

{{/* Of (list root entry [variable]): an environment variable from the Secret of the deployment. */}}
{{- define "moiety.fromSecret" -}}
{{- $root := index . 0 -}}
name: {{ index . 2 }}
valueFrom:
  secretKeyRef:
    name: {{ include "moiety.secret" $root }}
    key: {{ index . 1 }}
{{- end -}}

{{/* An entry that need not be there. */}}
{{- define "moiety.fromSecretIfThere" -}}
{{ include "moiety.fromSecret" . }}
    optional: true
{{- end -}}

{{- define "moiety.databaseVariable" -}}
{{- if .Values.database.bundled.enabled -}}
{{- include "moiety.fromSecret" (list . "database-url" "MOIETY_DATABASE_URL") -}}
{{- else -}}
name: MOIETY_DATABASE_URL
valueFrom:
  secretKeyRef:
    name: {{ .Values.database.existingSecret }}
    key: url
{{- end -}}
{{- end -}}

{{/* Waits for the database and brings the bundled one up to date, which no hook can do before it is installed. */}}
{{- define "moiety.migrateFirst" -}}
{{- if .Values.database.bundled.enabled }}
initContainers:
  - name: migrate
    {{- include "moiety.from" (list . "gateway") | nindent 4 }}
    args: [migrate, upgrade, --wait-s, {{ .Values.jobs.migrateSeconds | quote }}]
    env:
      - {{- include "moiety.databaseVariable" . | nindent 8 }}
    resources:
      {{- toYaml .Values.jobs.resources | nindent 6 }}
    volumeMounts:
      - {name: scratch, mountPath: /tmp}
{{- end }}
{{- end -}}
